@NAME@() {
  \builtin local __ryokan_asked __ryokan_answer
  \builtin read -r -N 1 -u 244 __ryokan_asked || \builtin return 1
  \builtin printf '%s\0' '@NAME@' "$#" "$@" >&254
  IFS= \builtin read -r -d '' -u 245 __ryokan_answer
  \builtin printf t >/proc/self/fd/244
  case $__ryokan_answer in
    +*) \builtin printf %s "${__ryokan_answer:1}" ;;
    *) \builtin printf '%s\n' "@NAME@: ${__ryokan_answer:1}" >&2; \builtin return 1 ;;
  esac
}
