"""Views of a run while it trains: in the terminal, and as a page of this machine."""
