"""torch modules behind the Model contract. Everything that knows torch's modules and hooks lives in this room."""
