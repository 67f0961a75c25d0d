\builtin set +xveuak
\builtin enable -n >&251
\builtin enable alias builtin cd command compgen complete declare dirs enable eval exec exit hash jobs local printf pushd read return set shift shopt source trap umask unalias unset
\builtin eval "$__ryokan_undo"
__ryokan_attributes() {
  \builtin declare -n __ryokan_r=$__ryokan_name
  \builtin printf -v "$1" '%s' "${__ryokan_r@a}"
}
# What functions under way hold beside the variables of the session goes, in a subshell: the exported mark, put on the
# session's variable, shows on the name unless a function's own is in front of it.
__ryokan_reveal() {
  \builtin shopt -u localvar_unset nocasematch
  IFS=$' \t\n'
  while \builtin read -r __ryokan_name; do
    case $__ryokan_name in
      __ryokan*|BASH*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|RANDOM|SECONDS|SHELLOPTS|SRANDOM|UID|_) continue ;;
    esac
    __ryokan_seen=
    for (( __ryokan_i = 0; __ryokan_i < __ryokan_f; __ryokan_i++ )); do
      __ryokan_attributes __ryokan_before
      case $__ryokan_before in
        *x*)
          \builtin declare -g +x "$__ryokan_name"
          __ryokan_attributes __ryokan_after
          \builtin declare -gx "$__ryokan_name"
          case $__ryokan_after in *x*) ;; *) break ;; esac ;;
        *)
          \builtin declare -gx "$__ryokan_name"
          __ryokan_attributes __ryokan_after
          \builtin declare -g +x "$__ryokan_name"
          case $__ryokan_after in *x*) break ;; esac ;;
      esac
      __ryokan_seen=1
      \builtin unset -v "$__ryokan_name" || break
    done
    case $__ryokan_seen in
      1) __ryokan_unset && \builtin unset -v "$__ryokan_name" ;;
    esac
  done < <(\builtin compgen -A variable)
}
__ryokan_unset() {
  \builtin declare -n __ryokan_r=$__ryokan_name
  case ${__ryokan_r+x}${__ryokan_r[*]+x} in
    '') \builtin return 0 ;;
    *) \builtin return 1 ;;
  esac
}
__ryokan_dump() {
@DUMP@
}
case $__ryokan_f in
  0)
    {
@DUMP@
    } >&251 ;;
  *) ( __ryokan_reveal; __ryokan_dump ) >&251 ;;
esac
\builtin printf . >&241
\builtin unset -f __ryokan_attributes __ryokan_reveal __ryokan_unset __ryokan_dump
\builtin return "$__ryokan_s"
