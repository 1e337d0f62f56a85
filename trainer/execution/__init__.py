"""One object for each way of making a step.

Hugging Face's loop and Accelerate's class ask it wherever ways differ: what a step of micro-batches is, its loss and
backward, clipping, evaluation, whole weights, and what a checkpoint holds. The core of the Trainer knows of no way.

    Execution                           Accelerate's own: a whole model on each rank, in DistributedDataParallel
    Zero                                DeepSpeed's engine
    Stowed                              the memory engine
    Pipeline, TensorParallel, Experts   around one of these: ranks that have a model together divide its weights
    Sliced                              around one of these: they divide the rows
    Exchanging, TwoLevel                around one of these: other exchanges between copies of the model
"""
