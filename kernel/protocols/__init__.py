"""The interfaces between the parts of penstock: leaves, handlers, layouts, stores, coordinators."""
