"""Networks written in NumPy with their own backward pass, behind the Model contract: engines need no torch."""
