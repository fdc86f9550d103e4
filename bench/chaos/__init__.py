"""`baton chaos`: a cluster of this machine under continuous random faults, and what every request then has to show."""
