"""Versions in an object store: S3, Google Cloud Storage, Azure, and what speaks like them.

    <url>/weightsync-store.json                    what lies here
    <url>/<model>/epochs/<n>.json, floors/<n>.json who may write, and what counts of older epochs
    <url>/<model>/versions/<v>/<epoch>.json        commit record: created once, never changed
    <url>/<model>/facts/<v>/<epoch>-<digest>.json  when and by which push that was
    <url>/<model>/full/<v>/<epoch>.json            a version that came as a delta, kept in full now
    <url>/<model>/manifests/<digest>.json
    <url>/<model>/shards/<digest>-<size>           byte for byte what was pushed
    <url>/<model>/pushes/<server>/<v>/...          what is known of pushes that are still open
    <url>/<model>/marks.json

The store needs one promise beyond put, get and list: of two that create a key, one is refused.

Commits are fenced by epochs; removals are not, and leave no tombstone. So a server that was frozen
in a removal still removes after another has taken over, and a commit that is finished after its
version was removed brings it back, where the floor has its record.
"""

from __future__ import annotations
