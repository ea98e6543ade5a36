"""The attention operations of NSA, implemented for CPUs and GPUs."""

# Namespace of the operators registered with torch, from the import name of the package. Another copy of the package
# under another name has its own operators in the same process.
NAMESPACE = __name__.removesuffix(".ops").replace(".", "_")
