"""The seven stages of torch.compile as data: one adapter a stage, one story of what happened in them.

    1 dynamo      what was traced: graphs, breaks, guards, recompilations, symbolic sizes
    2 functional  what AOTAutograd made of it: decompositions, mutations
    3 post_grad   what the graph passes did, graft's among them
    4 scheduling  what Inductor fused, what not, and why
    5 kernels     what was generated, from which lines
    6 runtime     CUDA graphs, memory
    7 caches      hits, misses and bypasses, with what went into the keys

Private names of torch stand in the adapters alone, each of which lists them (`NEEDS`).
"""
