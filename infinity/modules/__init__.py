"""What hooks an `nn.Module`: its units come before they are used, and go after."""
