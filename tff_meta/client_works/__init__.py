"""What clients do in a round, as `tff.learning.templates.ClientWorkProcess`."""
