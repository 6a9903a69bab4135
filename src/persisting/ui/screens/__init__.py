"""The screens of the console: each module reads parameters, asks, and renders a template."""
