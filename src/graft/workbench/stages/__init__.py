"""The stage lab: what torch.compile did to a model or a function, told, asked, followed and compared."""
