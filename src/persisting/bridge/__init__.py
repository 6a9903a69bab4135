"""Meeting Pulsing's users where they are: ``hook`` waits for the import, ``names`` completes it."""
