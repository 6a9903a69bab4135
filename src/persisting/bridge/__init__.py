"""Persisting under the names that Pulsing's users know.

``import_hook`` waits for Pulsing to be imported, ``pulsing_names`` adds what it lacks.
"""
