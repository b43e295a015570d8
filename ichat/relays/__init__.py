"""Frames between the owner of a gateway and its relays, their order, and how an owner adopts relays."""
