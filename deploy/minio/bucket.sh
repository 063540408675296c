#!/bin/sh
# Makes the bucket and the accounts of a fleet in MinIO: the origin may write below prod/, followers
# only read there. Safe to repeat; it ends well only if both accounts can use what they got.
set -eu

export MC_HOST_root="http://root:$MINIO_ROOT_PASSWORD@minio:9000"
export MC_HOST_origin="http://origin:$ORIGIN_SECRET@minio:9000"
export MC_HOST_follower="http://follower:$FOLLOWER_SECRET@minio:9000"

mc mb --ignore-existing root/weights
mc admin user add root origin "$ORIGIN_SECRET"
mc admin user add root follower "$FOLLOWER_SECRET"
for account in origin follower; do
  mc admin policy create root "$account" "/minio/$account.json"
  # It refuses what was done before; the next line tells whether it is so.
  mc admin policy attach root "$account" --user "$account" || true
  mc ls "$account/weights"
done
