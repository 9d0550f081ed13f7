"""Models written out in INT4: `billfish quantize`."""
