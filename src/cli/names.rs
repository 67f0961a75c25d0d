//! Names on the command line by what they name. Completions choose their candidates by these types.

/// A name or id on the command line.
macro_rules! names {
    ($($(#[$what:meta])* $name:ident),*) => {$(
        $(#[$what])*
        #[derive(Clone, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $name(String);

        impl From<String> for $name {
            fn from(name: String) -> $name {
                $name(name)
            }
        }

        impl std::ops::Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Debug::fmt(&self.0, f)
            }
        }
    )*};
}

names! {
    /// A kernel, by name or id.
    KernelArg,
    /// A group, by name.
    GroupArg,
    /// A kernel, by name or id, or a group, by name.
    KernelOrGroupArg,
    /// An image, by its version or the first digits.
    ImageArg
}
