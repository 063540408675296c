"""Generated from protos/weightsync/etcd/v3 by `make generate`: not edited by hand."""
