"""Generated from protos/weightsync/v1 by `make generate`: not edited by hand."""
