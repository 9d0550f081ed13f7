"""The measured comparison of the three kernel families: `billfish compare`.

records    what was measured: files of benchmarks/, or rows taken on this machine's GPU
measure    takes them, by the modules of billfish.bench
catalogue  what each family is, its techniques, and the code that does them
build      the comparison, one JSON document: every figure that is shown, and nothing computed
           after it
pictures   the parts of it that are counted and not timed: blocks, queue, shares
report     the document as one HTML file; terminal: as a table
"""
