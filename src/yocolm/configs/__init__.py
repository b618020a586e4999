"""One module per family; `yocolm.config` collects them."""
