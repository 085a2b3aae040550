"""Tables and pictures of the documents, made from the code and from results."""
