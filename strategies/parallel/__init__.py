"""How ranks divide the work: DeepSpeed, tensor parallelism, pipelines, sequences, experts. One file for each part."""
