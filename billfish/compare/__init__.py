"""The measured comparison of the three kernel families: `billfish compare`.

records    what was measured: files of benchmarks/, or rows taken on this machine's GPU
measure    takes them, by the modules of billfish.bench
catalogue  what each family is, its techniques, and the code that does them; topics: the same of the
           general kernels' techniques, which the benchmark names
build      the comparison, one JSON document: every figure that is shown, and nothing computed
           after it; claims, charts_data and roof_data are its parts
pictures   the parts of it that are counted and not timed: blocks, queue, shares
figures    numbers that know where in the document they are: nothing else is shown as measured
report     the document as one HTML file: sections and general_section of cards, charts, strips and
           diagrams, which svg and parts are made of
terminal   the document as tables; tables: those of the documentation
"""
