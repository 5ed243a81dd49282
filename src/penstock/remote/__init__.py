"""Asking services over a network: how fast, for how much money, what is kept of the answers. It knows no handler."""
