"""Generated from protos/weightsync/debug/v1 by `make generate`: not edited by hand."""
