"""`python -S -E fork_client.py SOCKET ARGUMENTS`: `python ARGUMENTS`, forked from a process that has imported much.

It hands its standard streams over (fork_parent.py), and ends when the forked process does.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as parent:
    parent.connect(sys.argv[1])
    socket.send_fds(parent, [json.dumps({"arguments": sys.argv[2:]}).encode() + b"\n"], [0, 1, 2])
    os.close(0)
    os.close(1)  # who reads it sees the end when the forked process ends
    while parent.recv(64):  # its number, and how it ended
        pass
