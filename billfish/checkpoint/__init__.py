"""Model files on disk: headers, metadata and memory maps, each count and offset checked.

Knows nothing of torch, and importing the package imports none of its readers.
"""
