"""The ladder on a user's model, which a function in the user's file builds."""
