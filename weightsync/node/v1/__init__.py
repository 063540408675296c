"""Generated from protos/weightsync/node/v1 by `make generate`: not edited by hand."""
