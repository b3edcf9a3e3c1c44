"""The update of an optimizer that steps in host memory or on drives."""
