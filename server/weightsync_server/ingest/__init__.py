"""Ingest processes: each serves PushWeights on addresses of its own and writes what comes.

A process knows who may call and where a chunk goes; whether it may go there, and all that follows
from it, is decided by the server's own process, to which it has a connection for every stream.
Callers can connect once it listens, and are heard when the server knows it and has told it `open`.

| op | from | what | descriptors |
| --- | --- | --- | --- |
| call | process | who calls, from where, until when; comes first | none |
| message | process | what is no plain chunk, or none that simply goes on | none |
| claim | process | a chunk of a shard has come: may it be written? | none |
| wrote | process | it is written up to here; due: the mark is reached, answer with mark | none |
| failed | process | the system refused something, or the call has no authority: why | none |
| end | process | the stream holds no more | none |
| heard | server | the call has come; comes first | none |
| grant | server | it may: where, from which byte, up to which mark | one: the segment's |
| mark | server | go on, up to this mark | none |
| stop | server | write no more | none |
| done | server | the status, and the response | none |

The process ends its half of the connection when it writes no more, and the kernel does when it is
gone: only then is a segment used for anything else.
"""
