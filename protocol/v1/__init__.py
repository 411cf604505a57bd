"""Version 1 of the wire format: the .proto files and the code generated from them (`make proto`)."""
