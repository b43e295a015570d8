"""What one process of iChat can be: a gateway or a worker. The two never import each other."""
