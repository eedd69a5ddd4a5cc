"""Training runs as the command line offers them: a config in, a directory of results out.

Owns the loop and everything a person sees or keeps of it. Must not know how a step works: that is `runtime`.

    session   what a config becomes: model, trainer, data      loop      steps, validations, checkpoints, stop
    recipe    its model, optimizer, schedule                    pipeline  its pipeline: plan, proof, where it is cut
    staged    its model as a chain that stages are cut from     pipelined the trainer of such a model, its trace
    progress  the live line                                     metrics   one JSON line a step
    results   summary, curve and sample at the end              curve     metrics as a picture
"""
