"""Text in, batches out.

    prepare   a corpus becomes documents, each for training or validation, and these become token ids on disk, once
    packing   documents into rows, best-fit, planned once from their lengths alone (`cropping`: as nanochat does it)
    rows      row `index` of an epoch as inputs and targets; the order of an epoch, which shuffles nothing in memory
    loader    the rows of step N as tensors on the device, made ahead by a thread

After `prepare`, everything is a pure function of the tokens and (seed, epoch, index). The only state of a run's data
is therefore one number: the next step.
"""
