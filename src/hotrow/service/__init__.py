"""Shards, and how one talks to them: the process that owns rows, the protocol, and the client."""
