"""From the quantization formats of checkpoints to one internal INT4 form.

Importing the package imports none of the formats.
"""
