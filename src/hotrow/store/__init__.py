"""The native row store and what goes with it: optimizers and snapshots."""
