"""The wire contract: .proto files and the stubs that `make protos` generates from them."""
