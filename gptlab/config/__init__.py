"""What a run is: frozen values with units in their names, checked at construction."""
