"""A local page that shows how a network reaches its equilibria."""
