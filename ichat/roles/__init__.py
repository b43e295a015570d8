"""The roles of a process of iChat: gateway and worker. The two never import each other."""
