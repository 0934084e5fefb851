"""The ranks of this node as seen from outside: messages, output, progress."""
