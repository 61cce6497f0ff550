"""Bridges to other packages; nothing is imported from them before it is needed."""
