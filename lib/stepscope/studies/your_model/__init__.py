"""Apply the ladder to a user's model, which a function in the user's file builds."""
