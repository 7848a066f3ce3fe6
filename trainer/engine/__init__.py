"""Engines: how an optimizer step runs over the weights. One port, several ways."""
