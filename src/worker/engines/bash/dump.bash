\builtin printf '\0@MARK@@KIND@\0%s\0%s\0%s\0%s\0%s\0%s\0%s\0%s\0' "$__ryokan_s" "$__ryokan_o" "$BASHOPTS" "$SHELLOPTS" "$PWD" "$__ryokan_bad" "$__ryokan_l" "$__ryokan_u"
\builtin printf '%s\0' "$__ryokan_f" "${#DIRSTACK[@]}" "${DIRSTACK[@]}" "$#" "$@"
\builtin umask; \builtin printf '\0'
\builtin declare -p; \builtin printf '\0'
\builtin declare -F; \builtin printf '\0'
\builtin alias -p; \builtin printf '\0'
\builtin hash -l; \builtin printf '\0'
\builtin complete -p; \builtin printf '\0'
\builtin jobs -l; \builtin printf '\0'
@FUNCTIONS@
\builtin printf '@MARK@E\0'
