"""HTTP/2 clients that take what they are sent as slowly as they are told, or not at all.

grpcio reads ahead on its own; these hold the flow-control windows, and the socket, themselves.
"""
