"""Generated from protos/weightsync/engine/v1 by `make generate`: not edited by hand."""
