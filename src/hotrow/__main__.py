"""`python -m hotrow` is the command `hotrow`, for `torchrun -m hotrow train run.toml`."""

from hotrow.cli import main

main()
