"""The sockets of the transport tcp. What goes over them: `serving.tcp_sending` and `loading.tcp_landing`."""
