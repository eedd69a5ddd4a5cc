"""Networks written in NumPy with their own backward pass, behind the Model contract: proof that engines need no torch."""
